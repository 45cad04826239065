import signal

# A shell script starts its background jobs with SIGINT ignored, and child processes inherit that. A handler that does
# nothing keeps it ignored here, while child processes start with the default: many tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
