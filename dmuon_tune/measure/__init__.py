"""Builds, checks and times one configuration in a process that may die without hurting the tuner."""
