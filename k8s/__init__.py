"""Manifests for Kubernetes, and the program that writes what they have in common with serve_config.yaml."""
