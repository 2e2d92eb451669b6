"""EmberFormer: a fire's next front from its history, wind and terrain."""
