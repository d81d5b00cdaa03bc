"""Released routers of other systems, which decide inside the simulation."""
