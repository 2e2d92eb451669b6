"""One file an op: docstring, argument checks, fake, autograd, vmap."""
