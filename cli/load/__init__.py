"""The load of `tandem bench`: what is sent and when, its run, its report and drawing."""
