"""Pure planning: no process group, no device, no model."""
