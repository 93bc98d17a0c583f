"""What a user calls: attach, the handle that it returns, its report, the step, a proposed damping."""
