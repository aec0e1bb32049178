"""bitsandbytes: what quantizes a parameter to 4 bits, saved and loaded with it."""
