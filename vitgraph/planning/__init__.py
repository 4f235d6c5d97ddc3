"""Pure planning: items, budgets, packing, accounting. Nothing here imports torch."""
