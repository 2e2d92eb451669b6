/* Operators that Python may call past torch's dispatcher: for module.c, which gives DIRECT a meaning. */
DIRECT(edge_maps_into)
DIRECT(edge_maps_stacked_into)
DIRECT(edge_maps_backward_into)
DIRECT(layer_norm2d_into)
DIRECT(layer_norm2d_backward_into)
