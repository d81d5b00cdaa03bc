"""`python -m deployments.cli`: the command `pagoda` of an installation without its script."""

from __future__ import annotations

from deployments.cli.main import main

if __name__ == "__main__":
    main()
