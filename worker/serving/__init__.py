"""A worker as routers see it: session, announcer, reports, process, spans and metrics."""
