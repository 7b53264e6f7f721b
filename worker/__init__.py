"""What both workers are made of besides the engine: one life of a process, and the stream to each router."""
