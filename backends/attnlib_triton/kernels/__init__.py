"""The kernels, in Triton. Importing a module of this folder imports triton."""
