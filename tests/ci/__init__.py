"""Tests of the programs in .ci/, which run as .ci/run and the Makefile run them."""
