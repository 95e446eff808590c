"""State outside the device: pinned host memory, disk and connectors, a chain that holds objects by their content."""
