"""Chat templates, and whether they keep what they wrote."""
