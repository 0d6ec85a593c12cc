package dev.maniple.client;

import java.time.Duration;

/**
 * How long and how often a stream tries to go on.
 *
 * @param retryFor how long it may bring nothing after it broke
 * @param startsOver how often it may begin anew
 */
public record Patience(Duration retryFor, int startsOver) {}
