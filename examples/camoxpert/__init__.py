"""CamoXpert, camouflaged object detection, trained with camox_ops or with stock PyTorch."""
