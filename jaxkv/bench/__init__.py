"""What `jaxkv bench` measures. Every result names its conditions and, where asked, peers from the same run."""
