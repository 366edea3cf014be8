"""Tables and figures of SpecPipe, by what is measured."""
