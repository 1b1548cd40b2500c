"""A fake of the engine, of our own: the places that the integration hooks, and what it reads there."""
