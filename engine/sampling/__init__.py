"""How tokens are chosen: what changes the logits, and how one is drawn from them. The Sampler puts it together."""
