"""Which samples at which position, and how they reach the device."""
