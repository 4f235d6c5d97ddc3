"""Static buffers, capture, replay: the graph manager, which knows no model."""
