"""Models as their users have them: finding their collections, running, tracing, replacing and comparing on copies."""
