package dev.maniple.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.maniple.v1.ErrorReason;
import dev.maniple.v1.StreamError;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.List;

/** Says why a call or a stream ended badly, and what the server said about it. */
public final class Problem extends Exception {
  private static final long serialVersionUID = 1;
  private static final String DOMAIN = "maniple.dev";

  /** One broken rule of a request. */
  public record Violation(String field, String description) {}

  private final Status.Code code;
  private final String reason;
  private final transient Duration retryAfter;
  private final transient List<Violation> violations;
  private final String ownerAddress;
  private final String incidentId;

  private Problem(
      Status.Code code,
      String message,
      String reason,
      Duration retryAfter,
      List<Violation> violations,
      String ownerAddress,
      String incidentId) {
    super(message == null ? "" : message);
    this.code = code;
    this.reason = reason;
    this.retryAfter = retryAfter;
    this.violations = violations;
    this.ownerAddress = ownerAddress;
    this.incidentId = incidentId;
  }

  /** Reads the status of a failed call and the details that came with it. */
  public static Problem of(StatusRuntimeException error) {
    Status status = error.getStatus();
    String reason = "";
    String ownerAddress = "";
    String incidentId = "";
    Duration retryAfter = Duration.ZERO;
    List<Violation> violations = List.of();
    com.google.rpc.Status details = StatusProto.fromThrowable(error);
    try {
      for (Any detail : details == null ? List.<Any>of() : details.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          if (info.getDomain().equals(DOMAIN)) {
            reason = info.getReason();
            ownerAddress = info.getMetadataOrDefault("owner_address", "");
            incidentId = info.getMetadataOrDefault("incident_id", "");
          }
        } else if (detail.is(RetryInfo.class)) {
          var delay = detail.unpack(RetryInfo.class).getRetryDelay();
          retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
        } else if (detail.is(BadRequest.class)) {
          violations =
              detail.unpack(BadRequest.class).getFieldViolationsList().stream()
                  .map(one -> new Violation(one.getField(), one.getDescription()))
                  .toList();
        }
      }
    } catch (InvalidProtocolBufferException unreadable) {
      // The status itself still says something.
    }
    return new Problem(
        status.getCode(), status.getDescription(), reason, retryAfter, violations, ownerAddress, incidentId);
  }

  /** A problem that no server told us of. */
  static Problem of(Status status) {
    return of(status.asRuntimeException());
  }

  /** Reads the form in which a stream repeats its error, since some proxies lose trailers. */
  static Problem inBand(StreamError error) {
    boolean named =
        error.getReason() != ErrorReason.ERROR_REASON_UNSPECIFIED && error.getReason() != ErrorReason.UNRECOGNIZED;
    return new Problem(
        Status.fromCodeValue(error.getCode()).getCode(),
        error.getMessage(),
        named ? error.getReason().name().substring("ERROR_REASON_".length()) : "",
        Duration.ZERO,
        List.of(),
        error.getOwnerAddress(),
        error.getIncidentId());
  }

  /** Prefers the status, which has all details, unless something on the way replaced it. */
  static Problem richer(Problem inBand, Problem status) {
    return inBand != null && !inBand.reason.equals(status.reason) ? inBand : status;
  }

  /** The code of gRPC. */
  public Status.Code code() {
    return code;
  }

  /** The name in the table of docs/errors.md; empty where the server did not say it. */
  public String reason() {
    return reason;
  }

  /** When to come again, where the server said so. */
  public Duration retryAfter() {
    return retryAfter;
  }

  /** What was wrong with the request. */
  public List<Violation> violations() {
    return violations;
  }

  /** Where the request is, if another control plane has it. */
  public String ownerAddress() {
    return ownerAddress;
  }

  /** The key under which the server logged a defect. */
  public String incidentId() {
    return incidentId;
  }

  /**
   * Tells whether the connection broke, so that nobody said what became of the request. Behind a proxy a killed server
   * shows as INTERNAL ("RST_STREAM"), not as UNAVAILABLE. Both come without a reason of ours.
   */
  public boolean isTransportLoss() {
    return reason.isEmpty() && (code == Status.Code.UNAVAILABLE || code == Status.Code.INTERNAL);
  }

  @Override
  public String toString() {
    return code + (reason.isEmpty() ? "" : " " + reason) + ": " + getMessage();
  }
}
