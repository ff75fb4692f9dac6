"""The facts of a request."""

from policy.facts import FlowFacts, RequestFacts, Scheme


def test_a_request_is_on_the_flow_of_its_host_port_and_scheme() -> None:
    request = RequestFacts("a.example", 8443, Scheme.HTTPS, "GET", "/x", "q=1")
    assert FlowFacts("a.example", 8443, Scheme.HTTPS) == request.flow


def test_a_query_is_not_shown() -> None:
    request = RequestFacts("a.example", 443, Scheme.HTTPS, "GET", "/x", "token=abc")
    assert "abc" not in repr(request) and "/x" in repr(request)
