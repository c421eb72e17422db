"""python -m longspan.bench: Longspan's torch modules against compositions of torch's own operators, on this machine."""
