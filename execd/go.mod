module sallyport.dev/execd

go 1.26

require (
	github.com/coder/websocket v1.8.15
	github.com/creack/pty v1.1.24
)
