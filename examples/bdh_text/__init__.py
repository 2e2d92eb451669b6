"""BDH, a language model of bytes, trained with camox_ops or with stock PyTorch on Python's own library sources."""
