"""The HTTP proxy before the ingresses: Ray Serve's HAProxy with limits for clients that mean harm or are broken.

Knows HAProxy's configuration as Ray writes it. Imports the standard library only: a reload must not wait for imports.
"""
