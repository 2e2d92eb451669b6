"""Vision-BDH, an image classifier of recurrent BDH layers, trained with camox_ops or with stock PyTorch."""
