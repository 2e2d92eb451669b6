// The operator namespace; every <op>_bind.cpp adds its schemas to it.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(camox_ops, m) { (void)m; }
