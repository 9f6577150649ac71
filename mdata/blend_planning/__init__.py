"""Blends before and during a training: making, previewing, changing and redistributing them."""
