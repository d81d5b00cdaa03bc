"""Kubernetes: KubeRay manifests, the image, monitoring, and the program that writes the Serve config into manifests.

Knows the layout of manifests and `serve_config.yaml`; nothing that runs in production imports this package.
"""
