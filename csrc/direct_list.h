/* Operators that Python may call past torch's dispatcher: for module.c, which gives DIRECT a meaning. */
DIRECT(layer_norm2d_into)
DIRECT(layer_norm2d_backward_into)
