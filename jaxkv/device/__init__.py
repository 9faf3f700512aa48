"""The device tower: the page pool, the jitted step programs, and what packs a plan into them."""
