"""Pages on the host: who holds them, which prefixes they spell, what is evicted, and the tiers below the device."""
