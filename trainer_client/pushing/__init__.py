"""Gradients on their way out: flat, in buckets, encoded, as soon as backward has made them."""
