"""What a run is made of: the options, and how they are parsed."""
