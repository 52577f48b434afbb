"""The I/O server of a whole host: many engines, one set of stores, one memory above them."""
