"""A language model of bytes with a mixture of experts, in one process or with its experts divided among several."""
