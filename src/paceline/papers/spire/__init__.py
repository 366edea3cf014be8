"""SPIRe: a draft model for throughput, with a sparse K/V cache, a pruned start and feedback memory."""
