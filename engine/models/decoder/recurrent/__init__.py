"""Recurrent layers: gated delta nets, Kimi delta attention, Mamba 2 and short convolutions."""
