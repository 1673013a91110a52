"""Answer one question: who asks, which generation answers, how many at once, what is shown, and why."""
