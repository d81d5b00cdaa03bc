"""The operations of recurrent layers as Triton kernels; importing this package imports none of them."""
