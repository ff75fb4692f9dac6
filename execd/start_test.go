package main

import (
	"net/http"
	"os"
	"testing"
	"time"

	"sallyport.dev/execd/internal/httpx"
	"sallyport.dev/execd/internal/testhost"
	"sallyport.dev/execd/internal/testkit"
)

func TestAProgramPutInPlaceOfTheDaemonIsNotStarted(t *testing.T) {
	directory := testkit.Opened(t)
	above, planted := directory+"/above", directory+"/planted"
	if err := os.Mkdir(above, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(testhost.Binary(t), above+"/execd"); err != nil {
		t.Fatal(err)
	}
	_, url, _ := testhost.DaemonUnder(t, []string{"EXECD_ACCESS_TOKEN=" + testkit.Token}, []string{above + "/execd"})
	testkit.Eventually(t, "an answer", testhost.Answers(url))
	err := os.Rename(above, directory+"/moved")
	if err == nil {
		err = os.Mkdir(above, 0o755)
	}
	if err == nil {
		err = os.WriteFile(above+"/execd", []byte("#!/bin/sh\ntouch "+planted+"; printf + >&3\n"), 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	client := http.Client{Timeout: 20 * time.Second}
	request, _ := http.NewRequest("GET", url+"/v1/filesystem/65061/65061/files/info?path=/", nil)
	request.Header.Set(httpx.TokenHeader, testkit.Token)
	response, err := client.Do(request)
	if _, missing := os.Stat(planted); missing == nil {
		t.Fatal("the planted program was started")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	testkit.Equal(t, 200, response.StatusCode)
}
