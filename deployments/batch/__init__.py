"""Batches: files and batches in a directory that all ingresses share, and the runner that computes them.

It knows files, batches, and how a line is sent to the application. The endpoints are in deployments/api/batches.
"""
