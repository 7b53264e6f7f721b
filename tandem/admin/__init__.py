"""The admin port: metrics, a page to look at, channelz. For operators, never for clients."""
