"""Voice families behind one interface: see `base.py`."""
