"""The pipeline round: the stages of a target are filled with the future of one request (SpecPipe)."""
