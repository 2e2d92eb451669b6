"""K-1, a tree of small transformers that trains the path an error came by, with camox_ops or with stock PyTorch."""
