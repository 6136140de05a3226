"""An analysis as text, JSON, a page; conditions on it, and two of them beside each other."""
