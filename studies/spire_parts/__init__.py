"""The tables and figures of the study of SPIRe, by what they need."""
